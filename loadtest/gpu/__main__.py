"""``python -m loadtest.gpu --out DIR``, in a checkout that need not be installed."""

from __future__ import annotations

import sys

from ..checkout import import_from_checkout

if __name__ == "__main__":
    import_from_checkout()
    from lexshard.loadtest.gpu.run import main

    sys.exit(main(sys.argv[1:]))
