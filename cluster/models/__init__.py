"""Models by their names on the Hugging Face Hub: asked for, refused early, fetched, checked."""
