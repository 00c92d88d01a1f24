# The images of this repository. Targets:
#   operator   operator and gate (one program), with the extra otel: no torch, no compiler, no pip
#   engine     the reference engine with the numpy build of its model, for tests and the quickstart
#   trainer    weight sender, SDK and the trainers of the tests, with torch
# All run as user 65532 with a read-only root file system; /tmp and what the pod mounts are all that they write.
# `make image` builds them. The base needs Python 3.11 to 3.13 with venv and CA certificates, whoever publishes it.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

# What each image is to hold: its part of the lock. Below, packages are installed anew only when this part
# changes (a builder may take a file with another time for a change).
FROM ${BASE} AS locks
WORKDIR /src
COPY images/subset.py requirements.lock pyproject.toml ./
RUN python3 subset.py --no-project hatchling > tools.lock \
 && python3 subset.py --extra otel > operator.lock \
 && python3 subset.py --no-project numpy > engine.lock \
 && python3 subset.py --extra torch safetensors > trainer.lock \
 && touch --date=@0 *.lock

FROM ${BASE} AS build
# Where packages come from and whose certificates are trusted; both are pip's own settings, unset unless given.
ARG PIP_INDEX_URL
ARG PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/rlfleet

FROM build AS wheel
COPY --from=locks /src/tools.lock /tmp/
RUN /opt/rlfleet/bin/pip install --quiet --require-hashes -r /tmp/tools.lock
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY operator operator
RUN /opt/rlfleet/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels .

FROM build AS operator-packages
COPY --from=locks /src/operator.lock /tmp/
RUN /opt/rlfleet/bin/pip install --quiet --require-hashes -r /tmp/operator.lock

FROM operator-packages AS operator-program
COPY --from=wheel /wheels /wheels
RUN /opt/rlfleet/bin/pip install --quiet --no-deps /wheels/*.whl \
 && /opt/rlfleet/bin/pip uninstall --quiet --yes setuptools pip

FROM operator-packages AS engine-program
COPY --from=locks /src/engine.lock /tmp/
RUN /opt/rlfleet/bin/pip install --quiet --require-hashes -r /tmp/engine.lock
COPY --from=wheel /wheels /wheels
RUN /opt/rlfleet/bin/pip install --quiet --no-deps /wheels/*.whl \
 && /opt/rlfleet/bin/pip uninstall --quiet --yes setuptools pip

FROM ${BASE} AS runtime
ENV PATH=/opt/rlfleet/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp USER=rlfleet
WORKDIR /tmp
USER 65532:65532

FROM runtime AS operator
COPY --from=operator-program /opt/rlfleet /opt/rlfleet
ENTRYPOINT ["rlfleet"]
CMD ["version"]

FROM runtime AS engine
COPY --from=engine-program /opt/rlfleet /opt/rlfleet
COPY e2e/__init__.py /opt/sim/e2e/
COPY e2e/sim /opt/sim/e2e/sim
ENV PYTHONPATH=/opt/sim
CMD ["python", "-m", "e2e.sim.engine", "--help"]

# torch and what it rests on are gigabytes: they are installed in place, as a copy would double the time and the space.
FROM build AS trainer
COPY --from=locks /src/trainer.lock /tmp/
RUN /opt/rlfleet/bin/pip install --quiet --no-compile --require-hashes -r /tmp/trainer.lock
COPY --from=wheel /wheels /wheels
RUN /opt/rlfleet/bin/pip install --quiet --no-deps /wheels/*.whl
COPY e2e/__init__.py /opt/sim/e2e/
COPY e2e/sim /opt/sim/e2e/sim
COPY e2e/scenarios/__init__.py e2e/scenarios/ports.py e2e/scenarios/publisher.py /opt/sim/e2e/scenarios/
ENV PATH=/opt/rlfleet/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp USER=rlfleet PYTHONPATH=/opt/sim
WORKDIR /tmp
USER 65532:65532
CMD ["python", "-m", "e2e.sim.trainer", "--help"]
