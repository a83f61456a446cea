"""HTTP, the OpenAI protocol and the command line."""
