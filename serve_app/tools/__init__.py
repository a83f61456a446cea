"""Tools and reasoning in chats: how models write them, the grammar and the reading of replies."""
