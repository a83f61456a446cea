"""``lexshard bench shards``: what an output head in several processes costs, and a model."""
