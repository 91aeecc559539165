"""``python -m kvtwin``: the command ``kvtwin``.

pyproject.toml installs this folder as the top level of kvtwin.
"""

import sys

from kvtwin.conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
