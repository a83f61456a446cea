"""Open-loop load on OpenAI endpoints: requests come when they come, whoever is still waiting."""
