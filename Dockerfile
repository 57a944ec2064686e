# docker build -t offbyone .                                for CPUs
# docker run --rm -it --shm-size=16g -v $PWD/outputs:/work/outputs offbyone train max_steps=20
FROM python:3.11-bookworm
# The image has g++ and Python's headers, which DeepSpeed needs for its op.
WORKDIR /opt/offbyone
COPY . .
RUN make install DEVICE=cpu && make op \
    && useradd --create-home --uid 1000 user && install -d -o user /work && chmod -R a+rwX .venv
ENV PATH=/opt/offbyone/.venv/bin:$PATH
USER 1000
WORKDIR /work
ENTRYPOINT ["offbyone"]
CMD ["--help"]
