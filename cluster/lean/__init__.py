"""A Ray node and a Ray Serve without what a server of one machine does not use."""
