"""Which output rows a draft model looks at in which context (DynaSpec): training the router."""
