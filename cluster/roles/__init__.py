"""How every role is started, watched and ended: as a plain process, or as a Ray actor."""
