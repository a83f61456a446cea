"""Receipts: what a reply was made of, so that anybody who has the model can make it again."""
