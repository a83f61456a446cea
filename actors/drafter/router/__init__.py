"""Which output rows a draft model looks at in which context (DynaSpec): the file and its use."""
