"""The options of each benchmark, without what takes seconds to import: help answers at once."""
