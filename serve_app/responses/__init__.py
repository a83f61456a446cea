"""OpenAI's Responses: translated to chat completions, and kept for those that refer to them."""
