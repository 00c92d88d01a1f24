"""The apiserver: client, reflector, fenced writes, events. Nothing here decides anything."""
