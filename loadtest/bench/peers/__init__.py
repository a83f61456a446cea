"""The engines lexshard is measured against, each behind the same small interface."""
