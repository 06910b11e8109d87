# The page of forerun and its JSON: docker build -t forerun . && docker run --rm -p 8777:8777 forerun
# The core answers models that come with the package; code of a user is not run.
FROM python:3.12-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python -m venv /opt/forerun && /opt/forerun/bin/pip install --no-cache-dir -c /src/constraints.txt "/src[web]"

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
