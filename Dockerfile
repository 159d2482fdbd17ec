# docker build -t medvl . && docker run --gpus all --ipc host -v /data:/data medvl torchrun --standalone recipes/convirt_mimic.py --help
# docker run -p 8765:8765 -v /data:/data medvl medvl serve --host 0.0.0.0 --checkpoint /data/run
#
# --ipc host: the loader's workers hand batches over through shared memory, which a container has little of.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# gcc and Python's headers: torch.compile builds what starts its kernels.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 medvl

ENV PATH=/opt/medvl/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NO_ALBUMENTATIONS_UPDATE=1

WORKDIR /home/medvl/project
# The packages first, by version and hash: they change less often than the code.
COPY constraints-locked.txt ./
RUN python3.12 -m venv /opt/medvl && pip install --no-cache-dir --require-hashes -r constraints-locked.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY medvl ./medvl
COPY recipes ./recipes
COPY data_cards ./data_cards
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
COPY scripts ./scripts
RUN chown medvl:medvl /home/medvl/project

USER medvl
CMD ["medvl", "--help"]
