"""What the server tells of its own API: `/openapi.json` and `/docs`, made at the first question."""
