"""The demo pair: from texts to a target, its draft and what both are worth."""
