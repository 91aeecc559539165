"""``python -m kvtwin``: the command ``kvtwin``.

pyproject.toml installs this folder as the top level of kvtwin, a namespace package, which has nothing else of its own.
"""

import sys

from kvtwin.conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
