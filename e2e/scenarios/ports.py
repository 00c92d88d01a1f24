"""Ports of the scenarios' pods. Apart from the publisher, which imports torch: seconds for whoever only asks it."""

#: Where the publisher takes orders.
CONTROL_PORT = 9451
