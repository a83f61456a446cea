"""Where things are in the checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "lexshard-demo"
DEMO_DRAFT = ROOT / "models" / "lexshard-demo-draft"
SUPPORT = ROOT / "tests" / "support"
SERVE_EXAMPLE = ROOT / "docs" / "serve-config.example.yaml"
