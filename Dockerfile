# A machine with Halfstep and nothing else: the wheel in a Debian 12 with Python.
#
#   .venv/bin/python tools/make_wheel
#   docker build -t halfstep .
#   docker run --rm -v "$PWD/runs:/work/runs" halfstep train --preset tiny --folder runs/first
FROM python:3.11-slim-bookworm
COPY dist/halfstep-*.whl /tmp/
# LibTorch for CPUs: from the index of PIP_INDEX_URL, if it is given.
ARG PIP_INDEX_URL
RUN pip install --no-cache-dir 'torch==2.13.*' && pip install --no-cache-dir /tmp/halfstep-*.whl && rm /tmp/halfstep-*.whl
WORKDIR /work
ENTRYPOINT ["halfstep"]
