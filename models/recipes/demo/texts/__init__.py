"""What the demo pair learns from: raw texts, conversations, tokens, windows of them."""
