"""`lexshard bench verify`: which drafts stand, beside what transformers and plain torch do."""
