# rayfed on Ray's image, for machines without a Python of their own and for Kubernetes (cluster-kubernetes.yaml):
#
#   docker build -t rayfed .
#   docker run --rm --shm-size=2g -v rayfed-results:/home/ray/results rayfed                 the README's demo
#   docker run --rm --shm-size=2g -v rayfed-results:/home/ray/results rayfed run rounds=5    any command of rayfed
#
# PyTorch brings CUDA 13, for which the machine (or the Kubernetes node) needs an NVIDIA driver of version 580 or later.
# Add `--gpus all` for GPUs, and `placement.gpus=1` to the command. Without a GPU, nothing else is needed.

# Ray's image without CUDA, because that of PyTorch is used
FROM rayproject/ray:2.60.0-py311-cpu
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

# The image's user is ray (uid 1000), who owns what is copied, because the build writes there. torch has a layer of its
# own, which stays when only rayfed changes.
COPY --chown=ray:users constraints.txt rayfed/
RUN pip install --no-cache-dir --constraint rayfed/constraints.txt torch \
 && pip install --no-cache-dir --constraint rayfed/constraints.txt --no-deps torchvision
COPY --chown=ray:users . rayfed/
RUN pip install --no-cache-dir --constraint rayfed/constraints.txt ./rayfed \
 && rm -r rayfed && mkdir results

ENTRYPOINT ["rayfed"]
CMD ["sweep", "demo"]
