"""The two ends of a thin link: a small model that drafts beside the user, a target elsewhere."""
