"""``python -m tox -e authors``: our references beside the authors' own code.

``KVTWIN_AUTHORS=/path`` names a folder with checkouts of the authors' repositories, one folder each, named like the
repository. A module in ``projects/`` says where a repository is, which of its files decide, and compares: it loads the
authors' functions and classes unchanged from the checkout, with stand-ins for packages that only run models, gives
both sides the same numbers on the CPU, and counts. Nothing of the authors' code is part of kvtwin.

Where the two differ, a comparison names the *reading* that explains it (``readings.py``), and counts again with both
sides under that reading. A difference that no reading explains fails the lane, and so does one that its reading leaves
over.
"""
