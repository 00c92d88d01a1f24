# The images of this repository. Targets:
#   operator   operator and gate (one program): no torch, no compiler, no pip
#   engine     the reference engine with the numpy build of its model, for tests and the quickstart
#   trainer    weight sender, SDK and the trainers of the tests, with torch
# All run as user 65532 with a read-only root file system; /tmp and what the pod mounts are all that they write.
# `make image` builds them. The base needs Python 3.11 to 3.13 with venv and CA certificates, whoever publishes it.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
# Where packages come from and whose certificates are trusted; both are pip's own settings, unset unless given.
ARG PIP_INDEX_URL
ARG PIP_CERT
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY images/subset.py images/
COPY requirements.lock pyproject.toml ./

FROM build AS wheel
RUN python3 images/subset.py --no-project hatchling > /tmp/lock \
 && python3 -m venv /tools \
 && /tools/bin/pip install --quiet --require-hashes -r /tmp/lock
COPY README.md LICENSE ./
COPY operator operator
RUN /tools/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels .

FROM build AS operator-packages
RUN python3 images/subset.py > /tmp/lock \
 && python3 -m venv /opt/rlfleet \
 && /opt/rlfleet/bin/pip install --quiet --require-hashes -r /tmp/lock

FROM operator-packages AS operator-program
COPY --from=wheel /wheels /wheels
RUN /opt/rlfleet/bin/pip install --quiet --no-deps /wheels/*.whl \
 && /opt/rlfleet/bin/pip uninstall --quiet --yes setuptools pip

FROM operator-packages AS engine-program
RUN python3 images/subset.py --no-project numpy > /tmp/lock \
 && /opt/rlfleet/bin/pip install --quiet --require-hashes -r /tmp/lock
COPY --from=wheel /wheels /wheels
RUN /opt/rlfleet/bin/pip install --quiet --no-deps /wheels/*.whl \
 && /opt/rlfleet/bin/pip uninstall --quiet --yes setuptools pip

FROM ${BASE} AS runtime
ENV PATH=/opt/rlfleet/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
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
RUN python3 images/subset.py --extra torch safetensors > /tmp/lock \
 && python3 -m venv /opt/rlfleet \
 && /opt/rlfleet/bin/pip install --quiet --no-compile --require-hashes -r /tmp/lock \
 && rm /tmp/lock
COPY --from=wheel /wheels /wheels
RUN /opt/rlfleet/bin/pip install --quiet --no-deps /wheels/*.whl
COPY e2e/__init__.py /opt/sim/e2e/
COPY e2e/sim /opt/sim/e2e/sim
COPY e2e/scenarios/__init__.py e2e/scenarios/publisher.py /opt/sim/e2e/scenarios/
ENV PATH=/opt/rlfleet/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp \
    PYTHONPATH=/opt/sim
WORKDIR /tmp
USER 65532:65532
CMD ["python", "-m", "e2e.sim.trainer", "--help"]
