# The page of forerun and its JSON: docker build -t forerun . && docker run --rm -p 8777:8777 forerun
# The core answers models that come with the package; code of a user is not run. `.ci/image` builds and tries it.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
COPY . /src
# SciPy is loaded by few questions, so its modules are compiled when they are asked for; nobody runs its tests here.
RUN python -m venv /opt/forerun && cd /opt/forerun \
    && bin/pip install --no-cache-dir --no-compile -c /src/constraints.txt "/src[web]" \
    && find lib/python3*/site-packages/numpy lib/python3*/site-packages/scipy -type d -name tests -prune -exec rm -r {} + \
    && bin/pip uninstall -y pip setuptools \
    && bin/python -m compileall -q -x /scipy/ lib

FROM python:3.12-slim
COPY --from=build /opt/forerun /opt/forerun
RUN useradd --create-home --uid 10001 forerun
USER forerun
ENV PATH=/opt/forerun/bin:$PATH
EXPOSE 8777
HEALTHCHECK CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8777/healthz')"]
# Inside a container every address is reached through the port that its owner publishes.
ENTRYPOINT ["forerun"]
CMD ["serve", "--host", "0.0.0.0", "--allow-remote"]
