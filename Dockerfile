# Flash Kernels on NVIDIA's PyTorch image. docs/container.md says how to run it, and what each flag is for.
ARG BASE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE}

WORKDIR /opt/flashkernels
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY src src
COPY examples examples

# --no-deps: torch, triton and numpy are the image's own, built for one another; pip must not put others in their place.
RUN pip install --no-cache-dir rich typer jinja2 matplotlib \
 && pip install --no-cache-dir --no-deps .

# Compiled kernels outlive the container where this folder is a volume; any user may write there.
RUN mkdir -p /cache && chmod 1777 /cache
ENV FLASHKERNELS_CACHE=/cache/flashkernels TRITON_CACHE_DIR=/cache/triton
VOLUME /cache

# The commit that benchmarks write into their results: the image has no checkout to ask.
ARG COMMIT=
ENV FLASHKERNELS_COMMIT=${COMMIT}

# The build machine may have no GPU; whatever else is broken fails the build here.
RUN flashkernels doctor
CMD ["flashkernels", "doctor"]
