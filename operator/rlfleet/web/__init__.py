"""The operator's web page: the fleet, its rounds, and why; for looking only.

Invariant: every read is made with the viewer's own bearer token, so the page shows nobody more than kubectl would. The
operator's rights are used for one thing only, to ask gates and senders for a dry run, after the viewer's token has read
the objects that it is about.
"""
