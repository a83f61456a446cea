"""Files of `ray up`: what may stand in them, and the nodes that they give."""
