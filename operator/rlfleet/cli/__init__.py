"""The user's command line: ``rlfleet`` and ``kubectl rlfleet`` (extra ``rlfleet[cli]``).

Invariant: it sees and steers through the apiserver with the user's own rights; it never acts on an engine itself.
What it changes is declarative (a SyncRound, a field of a spec, an annotation): the operator does the work, fenced.
"""
