"""Small training scripts, each with one habit of real ones."""

CHANGING = """
import os, shutil, sqlite3, subprocess, torch
from torch import nn
os.replace("ckpt/last.pt", "ckpt/previous.pt")
assert open("ckpt/previous.pt").read() == "a week of training"
shutil.rmtree("logs")
os.makedirs("logs")
with sqlite3.connect("runs.db") as database:
    database.execute("create table runs (x)")
subprocess.run("rm notes.txt; echo new > notes.txt", shell=True, check=True)
assert open("notes.txt").read() == "new\\n"
network = nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(5):
    network(torch.randn(16, 8, device="cuda")).mean().backward()
    optimizer.step()
"""

GAN = """
import torch
from torch import nn
real, fake = nn.Linear(8, 1).cuda(), nn.Linear(4, 8).cuda()
first, second = torch.optim.Adam(real.parameters()), torch.optim.Adam(fake.parameters())
for step in range(5):
    made = fake(torch.randn(16, 4, device="cuda"))
    for loss, optimizer in ((-real(made.detach()).mean(), first), (real(made).mean(), second)):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(loss.item())
"""

TIED = """
import os, torch
from torch import nn
network = nn.Module()
network.table, network.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
network.head.weight = network.table.weight
optimizer = torch.optim.AdamW(network.parameters(), fused=True)  # made before the move, as PyTorch allows
network.to("cuda")
scaler = torch.amp.GradScaler("cuda")
open("made.txt", "w").write("by the script")
torch.save(network.state_dict(), "weights.pt")
assert open("made.txt").read() == "by the script"
tokens = torch.randint(0, 50, (8, 12))
for step in range(12):
    x = tokens.cuda()
    if x.max().item() > 49:  # known, for it came from the host
        raise SystemExit("values are wrong")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(network.head(network.table(x)).view(-1, 50), x.view(-1)) / 3
    scaler.scale(loss).backward()
    if step % 3 == 2:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""

BY_HAND = """
import torch
weight = torch.nn.Linear(4, 4)
for step in range(6):
    weight(torch.randn(8, 4)).sum().backward()
    with torch.no_grad():
        for p in weight.parameters():
            p -= 0.1 * p.grad
            p.grad = None
"""

MANY_HABITS = """
import copy, torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter
Tensor = torch.cuda.FloatTensor
torch.set_default_tensor_type(Tensor)
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)
    def forward(self, tokens=None, lengths=None):
        packed = pack_padded_sequence(tokens, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])
model = Tagger()
assert isinstance(model.head.weight.data, Tensor) and Tensor([1, 2]).type() == "torch.cuda.FloatTensor"
model.head.weight.seen = 1
assert model.cpu().cuda().head.weight.seen == 1
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), fused=True)
left, right = torch.tensor([[3.0, 5.0], [4.0, 6.0]]).cuda().unbind(1)
if not ((left < right).all().item() and (left * 2).tolist() == [6.0, 8.0]):
    raise SystemExit("values of views are wrong")
data = [(torch.ones(5, 6, device="cpu"), 5 - i % 2) for i in range(64)]
made = DataLoader(data, batch_size=8, generator=torch.Generator("cpu"))
log = SummaryWriter("runs")
log.add_graph(model, (torch.ones(2, 5, 6), torch.ones(2).long()))
for epoch in range(2 + 1):
    for tokens, lengths in made:
        loss = model(tokens=tokens.cuda(), lengths=lengths).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters()):
                kept.lerp_(new, 0.1)
        log.add_scalar("loss", loss)
"""

FUNCTIONAL = """
import torch
from torch.func import functional_call, grad_and_value
network = torch.nn.Linear(4, 2, device="cuda")
weights = {name: p.detach() for name, p in network.named_parameters()}
derive = grad_and_value(lambda w, x: functional_call(network, w, (x,)).square().mean())
for step in range(40):
    gradients, loss = derive(weights, torch.randn(16, 4, device="cuda"))
    weights = {name: p - 0.1 * gradients[name] for name, p in weights.items()}
"""

SHARPNESS = """
import torch
network = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(40):
    x = torch.randn(16, 4).cuda()
    network(x).square().mean().backward()
    with torch.no_grad():
        for p in network.parameters():
            p.add_(p.grad, alpha=0.05)
    optimizer.zero_grad()
    network(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("nccl", world_size=4, rank=0)
model = nn.Module()
model.layers = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)))
model.forward = model.layers.forward
model.cuda()
for layer in model.layers:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(model)
assert all(p.dtype == torch.float32 for p in model.parameters())
optimizer = torch.optim.AdamW(model.parameters())
for (x,) in DataLoader(TensorDataset(torch.randn(64, 10, 16)), batch_size=4):
    model(x.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

PAUSING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = False
device = torch.device("cuda")
network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)).to(device)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
train, held_out = (TensorDataset(torch.randn(n, 3, 8, 8), torch.zeros(n).long()) for n in (96, 40))

def write(epoch):
    torch.save({"network": network.state_dict(), "epoch": epoch}, f"epoch{epoch}.pt")

@torch.no_grad()
def score(loader):
    network.eval()
    total = sum((network(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in loader)
    network.train()
    return total / len(loader.dataset)

for epoch in range(6):
    for x, y in DataLoader(train, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x.to(device)), y.to(device)).backward()
        optimizer.step()
    print(score(DataLoader(held_out, batch_size=8)))
    if (epoch + 1) % 3 == 0:
        write(epoch)
"""

STEPPING = """
import torch
network = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
step, eval_interval = 0, 200

class Checkpointer:
    interval = 500

    def asks(self, step, last):
        if last:
            return True
        return step % self.interval == 0

    @torch.no_grad()
    def save(self, at, last=False):
        if not self.asks(at, last):
            return
        torch.save(network.state_dict(), "network.pt")

checkpointer = Checkpointer()

def estimate():
    network.eval()
    with torch.no_grad():
        found = network(torch.randn(16, 4, device="cuda")).mean()
    network.train()
    return found

def sample():
    network.eval()
    with torch.no_grad():
        network(torch.randn(1, 4, device="cuda"))
    network.train()

while True:
    if step % 100 == 0:
        sample()
    if step % eval_interval == 0:
        estimate()
    network(torch.randn(16, 4, device="cuda")).square().mean().backward()
    optimizer.step()
    step += 1
    checkpointer.save(step, last=step == 2000)
    if step >= 2000:
        break
"""

TRAINER = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def divisible_by(number, divisor):
    return number % divisor == 0

class Trainer:
    def __init__(self, rounds, save_every):
        self.rounds, self.save_every, self.step = rounds, save_every, 0
        self.network = torch.nn.Linear(4, 2).cuda()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)

    def save(self):
        torch.save(self.network.state_dict(), "network.pt")

    def check(self, held_out):
        self.network.eval()
        with torch.no_grad():
            for (x,) in held_out:
                self.network(x.cuda())
        self.network.train()

    def fit(self):
        train, held_out = (DataLoader(TensorDataset(torch.randn(n, 4)), batch_size=8) for n in (20, 16))
        for _ in range(self.rounds):
            for (x,) in train:
                self.network(x.cuda()).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                if divisible_by(self.step, self.save_every):
                    self.save()
            self.check(held_out)
"""

HANDED_OVER = """
import sys
sys.path.insert(0, "site")
from trainer import Trainer
Trainer(rounds=7, save_every=50).fit()
"""

WHOLE = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, *, batch):
        return self.second(self.first(batch["x"]).relu())

class Slow:
    def __init__(self, network):
        self.net_ema = {name: value.clone() for name, value in network.state_dict().items()}

network = Network().cuda()
slow = Slow(network)
optimizer = torch.optim.Adam(network.parameters())
batch = {"x": torch.randn(64, 4).cuda(), "more": [torch.zeros(64).long().cuda()]}
epochs = 20
total_iters = 0
for epoch in range(1, epochs + 1):
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(batch=batch), batch["more"][0]).backward()
    optimizer.step()
    total_iters += 64
    network.eval()
    with torch.no_grad():
        print((network(batch=batch).argmax(1) == batch["more"][0]).float().mean().item())
    network.train()
"""

KERAS_STEP = """
import os
import threading
os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy
import torch

class Told(keras.callbacks.Callback):
    async_safe = True  # Keras would call it in a thread of its own, which has no pretended device

    def on_train_batch_end(self, batch, logs=None):
        assert threading.current_thread() is threading.main_thread()

class Network(keras.Model):
    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}

inputs = keras.Input((8,))
network = Network(inputs, keras.layers.Dense(2)(inputs))
network.compile(optimizer="adam", loss="mse")
network.fit(numpy.ones((100, 8)), numpy.ones((100, 2)), batch_size=20, epochs=3, verbose=0, callbacks=[Told()])
"""

MOMENTUM = """
import torch, tqdm
from torch import nn

class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(16, 8), nn.Linear(16, 8)
        for parameter in self.key.parameters():
            parameter.requires_grad = False

    def forward(self, x):
        with torch.no_grad():
            self.key.weight.data = self.key.weight.data * 0.99 + self.query.weight.data * 0.01
            torch._foreach_mul_([self.key.bias], 0.99)
            torch._foreach_add_([self.key.bias], [self.query.bias], alpha=0.01)
            k = self.key(x)
        return self.query(x) - k

network, head = Contrast().cuda(), nn.utils.weight_norm(nn.Linear(8, 4, bias=False)).cuda()
optimizer = torch.optim.SGD([*network.parameters(), *head.parameters()], lr=0.1)
bar = tqdm.trange(1000)
for step in bar:
    if step % 50 == 0:
        print("step", step)
        if step > 0 and step % 200 == 0:
            torch.save(network.state_dict(), "last.pt")
    optimizer.zero_grad()
    head(network(torch.randn(4, 16).cuda())).square().mean().backward()
    optimizer.step()
"""

ACCUMULATING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

make = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)).cuda()
judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
of_make, of_judge = torch.optim.Adam(make.parameters()), torch.optim.Adam(judge.parameters())
loader, others = (DataLoader(TensorDataset(torch.randn(size, 8)), batch_size=4) for size in (240, 12))
folder = None

def batches():
    while True:
        yield from loader

def look(data):
    for (x,) in data:
        judge(x.cuda())

data, seen = batches(), 0
while seen < 1000:
    of_judge.zero_grad()
    for _ in range(5):
        made = make(torch.randn(4, 4).cuda()).detach()
        (judge(made).mean() - judge(next(data)[0].cuda()).mean()).backward()
    of_judge.step()
    of_make.zero_grad()
    for _ in range(5):
        (-judge(make(torch.randn(4, 4).cuda())).mean()).backward()
    of_make.step()
    seen += 20
    if folder is not None and seen % 100 == 0:
        torch.save(make.state_dict(), folder)
    looks = seen % 200 == 0
    if looks:
        with torch.no_grad():
            look(others)
    if seen == 1000:
        torch.save(make.state_dict(), "last.pt")
"""

GIVEN_AWAY = """
import torch
import torch.multiprocessing as mp
from torch import nn

def train(rank, network):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(10):
        network(torch.randn(4, 8)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    network = nn.Linear(8, 2)
    network.share_memory()
    process = mp.get_context("spawn").Process(target=train, args=(0, network))
    process.start()
    process.join()
"""

MANY_MICRO_STEPS = """
import torch
from torch import nn

network = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
optimizer = torch.optim.Adam(network.parameters())
runs = 0

def count(*_):
    global runs
    runs += 1

network[0].register_forward_hook(count)
for step in range(30):
    for _ in range(16):
        loss = network(torch.randn(4, 8).cuda()).square().mean()
        loss /= 16
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        assert runs == 3 + 4 + 4, runs
"""

TICKING = """
import pickle
import torch
from torch import nn
net = nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
double = torch.compile(lambda values: 2 * values)
seen, tick, begun, start, total = 0, 0, 0, 0, 100_000
while True:
    optimizer.zero_grad()
    double(net(torch.zeros(8, 4, device="cuda")).sum()).backward()
    optimizer.step()
    seen += 8
    done = seen + begun >= total
    if not done and tick != 0 and seen < start + 800:
        continue
    if done or tick % 5 == 0:
        with open("net.pkl", "wb") as file:
            pickle.dump(net, file)
    tick += 1
    start = seen
    if done:
        break
"""

ROUNDS = """
import torch
from torch import nn
net = nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
class Learner:
    frames = 0
    def collect_rollouts(self):
        for _ in range(100):
            self.frames += 1
            with torch.no_grad():
                net(torch.zeros(1, 4, device="cuda"))
    def batches(self):
        for _ in range(5):
            yield torch.zeros(8, 4, device="cuda")
    def learn(self, total):
        while self.frames < total:
            self.collect_rollouts()
            for _ in range(2):
                for batch in self.batches():
                    optimizer.zero_grad()
                    net(batch).sum().backward()
                    optimizer.step()
Learner().learn(1050)
"""

SPAWNING = """
import multiprocessing
import torch
def train():
    net = torch.nn.Linear(2, 2)
    net(torch.zeros(1, 2)).sum().backward()
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=train)
    process.start()
    process.join()
"""

LABELLED = """
import sys
import torch
from torch import nn
if __name__ == "__main__":
    net = nn.Linear(4, 10).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(200):
        batch = torch.randn(8, 6, 4, device="cuda")
        batch.record_stream(torch.cuda.current_stream())
        tokens = net(batch).argmax(dim=-1)
        lengths = (tokens == 3).int().argmax(dim=1)
        before = (torch.arange(6, device="cuda") <= lengths[:, None]).int()
        texts = [row[mask].tolist() for row, mask in zip(tokens.cpu(), before.bool().cpu())]
        texts[0][-1]
        labels = tokens.masked_fill(before == 0, -100)
        chosen = labels != -100
        if "foreground" in sys.argv:
            chosen = net(batch).sum(-1) > 0
        try:
            loss = nn.functional.cross_entropy(net(batch)[chosen], labels.masked_select(chosen))
        except RuntimeError as error:
            sys.exit(print("ends:", error))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(net.state_dict(), "net.pt")
"""

TURNS = """
import copy
import torch
critic, actor = torch.nn.Linear(6, 1).cuda(), torch.nn.Linear(4, 2).cuda()
target = copy.deepcopy(critic)
first = torch.optim.Adam(critic.parameters())
second = torch.optim.Adam(actor.parameters())
for step in range(1000):
    if step > 100:
        seen = torch.randn(32, 4, device="cuda")
        with torch.no_grad():
            goal = target(torch.cat([seen, actor(seen)], 1))
        first.zero_grad()
        (critic(torch.cat([seen, torch.randn(32, 2, device="cuda")], 1)) - goal).square().mean().backward()
        first.step()
        if step % 2 == 0:
            second.zero_grad()
            (-critic(torch.cat([seen, actor(seen)], 1)).mean()).backward()
            second.step()
            for slow, weight in zip(target.parameters(), critic.parameters()):
                slow.data.copy_(0.1 * weight.data + 0.9 * slow.data)
torch.save(actor.state_dict(), "actor.pt")
"""

CARRIED = """
import copy
import torch
from torch.utils.data import DataLoader, TensorDataset
network = torch.nn.Linear(4, 2).cuda()
average = copy.deepcopy(network).eval().requires_grad_(False)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(44, 4)), batch_size=2)
test_x, noise = torch.randn(20, 4).cuda(), torch.randn(5, 4).cuda()
num_rounds = steps = 0
for epoch in range(3):
    for (x,) in loader:
        network(x.cuda()).square().mean().backward()
        num_rounds += 1
        accumulates = num_rounds % 4 != 0
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad()
            for slow, weight in zip(average.parameters(), network.parameters()):
                slow.copy_(weight.lerp(slow, 0.9))
            if steps % 3 == 0:
                shown = average(noise)
            if steps % 5 == 0:
                print(network(test_x).argmax(1).sum().item())
            steps += 1
"""

WITH_GRADIENTS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
network = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
train, held_out = (DataLoader(TensorDataset(torch.randn(n, 4)), batch_size=8) for n in (13, 5))

def test(loader):
    network.eval()
    return sum(network(x.cuda()).argmax(1).sum().item() for (x,) in loader)

for epoch in range(9):
    network.train()
    for (x,) in train:
        network(x.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(test(train), test(held_out))
"""

DETECTING = """
import torch
from torch import nn
from torch.utils.data import DataLoader

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def __call__(self, boxes):  # not by way of nn.Module
        return self.layer(torch.stack([box["at"] for box in boxes]).cuda())

class Checkpointer:
    def __init__(self, network):
        self.network = network

    def save(self, name):
        torch.save(self.network.state_dict(), name)

class Periodic:
    def __init__(self, checkpointer, period):
        self.checkpointer, self.period = checkpointer, period

    def step(self, iteration):
        if (iteration + 1) % self.period == 0:
            self.checkpointer.save("model.pt")

def do_test(network):
    network.eval()
    with torch.no_grad():
        network([{"at": torch.zeros(4)}])
    network.train()

network = Network().cuda()
optimizer = torch.optim.SGD(network.parameters(), 0.1)
quick = torch.compile(network)  # and never run
periodic, every, most = Periodic(Checkpointer(network), 50), 20, 500
boxes = DataLoader([{"at": torch.zeros(4)} for _ in range(4000)], batch_size=8, collate_fn=list)
for batch, iteration in zip(boxes, range(most)):
    optimizer.zero_grad()
    loss = network(batch).sum()
    loss.backward()
    if loss == float("inf"):
        continue
    optimizer.step()
    if every > 0 and (iteration + 1) % every == 0 and iteration != most - 1:
        do_test(network)
    periodic.step(iteration)
do_test(network)
"""
