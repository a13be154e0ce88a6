"""Flower's client app for a job.

It is a module of its own because Ray then sends the workers its name, so that each of them keeps the job, the data of
its clients and one model between messages.
"""

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from peers.job import Job, train

app = ClientApp()


@cache
def load(path: str) -> Job:
    torch.set_num_threads(1)
    return Job.load(path)


@cache
def model_of(path: str) -> nn.Module:
    job = load(path)
    model = job.model().train()
    job.initial.clear()  # memory that the engine does not need
    return model


@cache
def data_of(path: str, client: int) -> tuple[Tensor, Tensor]:
    return load(path).data(client)


@app.train()
def train_client(message: Message, context: Context) -> Message:
    config = message.content["config"]
    path, client = config["job"], int(context.node_config["partition-id"])
    job, model = load(path), model_of(path)
    x, y = data_of(path, client)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    steps = train(model, x, y, job.batches(client, config["server-round"]), job.lr)
    metrics = MetricRecord({"num-examples": len(y), "steps": steps})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
