"""Bodies: everything of a language model but its output head (see ``batch.Body``)."""
