"""Executing sync rounds: DESIGN section 5 as code.

- ``ledger``: the durable record (RLPipeline.status, SyncRound.status) and every fenced write to it;
- ``fleet``: engines and sender as observed, and orders to many gates at once;
- ``transfer``: staging, loading, verifying, publishing;
- ``executor``: the phases in order, takeover, commit, reopen, Holding, abort.

What to do is decided in ``plan.rounds`` and ``plan.verdicts``; nothing here decides from memory what a restarted
operator could not decide again from the ledger and the gates.
"""
