"""`lexshard bench engine`: whole engines on batches of requests, beside other engines."""
