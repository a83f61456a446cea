"""Making the demo checkpoint pair that ships in ``models/``."""

from lexshard.serve_app.demo.pipeline import train_demo

__all__ = ["train_demo"]
