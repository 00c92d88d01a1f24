"""rlfleet keeps RL inference fleets on the right weights.

Packages, in the order in which imports may point (each may import those before it):
``api`` < ``plan`` < ``kube``, ``engine``, ``router`` < ``gate``, ``sender`` < ``control`` < ``app``;
``client`` and ``sender`` run in the trainer and import nothing of ours but ``api``.
"""

__version__ = "0.1.0"
