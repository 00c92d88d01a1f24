"""What people are shown of a fleet, made from the objects alone: the command line and the web page both draw this.

Invariant: pure functions of what the apiserver answered; nothing here asks, decides or guesses. What an object does not
say stays absent and is drawn as unknown.
"""
