"""Other people's packages in the shape of ours, for ``--kv-impl``: a thin module each, which computes nothing itself.

An adapter has attributes with our methods' names, and on them the functions that the package can serve. What it lacks
is left out: *not provided*. Where it has the function but does not take an argument (a mask, say), the adapter raises
NotImplementedError naming that: the example is passed over, and the summary says how many were, and why.

``<name>.xfails`` beside an adapter lists the tests that fail for differences that CONTRIBUTING.md explains.
"""
