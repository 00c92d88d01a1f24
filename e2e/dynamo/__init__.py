"""The real Dynamo runtime for tests: pinned environments, a worker with a scripted engine, processes to run them."""
