"""Two nodes: network namespaces with addresses of their own, joined by nothing but a virtual cable, run one plan through torchrun.

    namespace a 10.77.0.1 ── veth ── 10.77.0.2 namespace b

Loss and parameters equal those of one process. Nothing of it is visible outside the namespaces, which are deleted at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import built, descend, make_plan, relative
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchrun import MARK, command, gone, marked, run

ADDRESSES, CABLE, PORT = ("10.77.0.1", "10.77.0.2"), "cable", 29511
NAMESPACES, PREFIX = Path("/var/run/netns"), "shardwright-"
STEPS, BATCH = 3, 8

SCRIPT = """
import os
import torch
from harness import built, descend
from test_multinode import BATCH, build, samples
from planner import load_plan
from runtime import parallelize

torch.set_num_threads(1)
model, _, _, _ = built(build, torch.float64)
plan = load_plan("plan.json")
parallel = parallelize(model, plan, batch="local", timeout_s=60)
losses = []
for batch in parallel.dataloader(samples(), BATCH, shuffle=False):
    losses.append(parallel.step(*batch))
    descend(parallel)
parallel.save("checkpoint")
torch.save((losses, parallel.gather_state_dict()), f"rank-{os.environ['RANK']}-of-node-{os.environ['GROUP_RANK']}")
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.c(torch.tanh(self.b(torch.relu(self.a(x))))), y)


def build() -> Any:
    torch.manual_seed(3)
    return Net(), (samples()[:BATCH], {}), None


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(STEPS * BATCH, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (len(x),), generator=generator))


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that can reach each other and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` here (iproute2): two nodes cannot be made")
    delete_orphans()
    names = tuple(f"{PREFIX}{os.getpid()}-{node}" for node in "ab")
    before = signal.signal(signal.SIGTERM, interrupted)
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        ip("-n", names[0], "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", names[1])
        for name, address in zip(names, ADDRESSES):
            ip("-n", name, "address", "add", f"{address}/30", "dev", CABLE)
            for link in ("lo", CABLE):
                ip("-n", name, "link", "set", link, "up")
        yield names[0], names[1]
    finally:
        for name in names:
            delete(name)
        signal.signal(signal.SIGTERM, before)
        assert not any((NAMESPACES / name).exists() for name in names)


def interrupted(*_: Any) -> None:
    """A test run that is told to end cleans up first."""
    raise KeyboardInterrupt("SIGTERM")


def delete_orphans() -> None:
    """Namespaces of test runs that were killed outright: their names tell the process."""
    for path in NAMESPACES.glob(f"{PREFIX}*"):
        if not Path("/proc", path.name.removeprefix(PREFIX).split("-")[0]).exists():
            delete(path.name)


def delete(name: str) -> None:
    """A namespace and what runs in it. Either command fails now and then where other processes come and go: neither waits for the other."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            for pid in ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):
            ip("netns", "delete", name)
        if not (NAMESPACES / name).exists():
            return
        time.sleep(0.2)


def on_node(name: str, node: int, processes: int, script: Path) -> list[str]:
    """torchrun on one of the nodes; the first one holds the rendezvous."""
    options = [
        "--nnodes=2", f"--nproc-per-node={processes}", "--rdzv-backend=c10d", "--rdzv-id=two-nodes",
        f"--rdzv-endpoint={ADDRESSES[0]}:{PORT}", f"--rdzv-conf=is_host={int(node == 0)},join_timeout=100",
        f"--local-addr={ADDRESSES[node]}",
    ]  # fmt: skip
    return ["ip", "netns", "exec", name, *command(*options, str(script))]


def received_bytes(name: str) -> int:
    (link,) = json.loads(ip("-n", name, "-s", "-j", "link", "show", CABLE))
    return int(link["stats64"]["rx"]["bytes"])


LAYOUTS = [
    (1, dict(data=2, zero=3)),
    (2, dict(data=2, tensor=2)),
    (2, dict(pipe=2, tensor=2, microbatches=2)),
]


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS, ids=str)
def test_two_nodes_equal_one_process(nodes: tuple[str, str], processes: int, layout: dict[str, Any], tmp_path: Path) -> None:
    make_plan(build, layout, torch.float64, {}).save(tmp_path / "plan.json")
    script = tmp_path / "work.py"
    script.write_text(SCRIPT)
    before = [received_bytes(name) for name in nodes]
    with marked(GLOO_SOCKET_IFNAME=CABLE) as environment:
        run([on_node(name, node, processes, script) for node, name in enumerate(nodes)], environment, tmp_path, timeout_s=200)
        assert gone(environment[MARK])
    for name, earlier in zip(nodes, before):
        assert received_bytes(name) - earlier > 10_000, "the nodes did not talk over the cable"

    found = sorted(tmp_path.glob("rank-*"))
    ranks = {path.name.split("-")[1]: path.name.split("-")[-1] for path in found}
    assert len(ranks) == 2 * processes and sorted(ranks.values()) == sorted("01" * processes)
    losses, state = plainly()
    for path in found:
        got, here = torch.load(path)
        assert len(got) == STEPS and all(relative(a, b) < 1e-10 for a, b in zip(got, losses))
        assert list(here) == list(state) and all(relative(here[name], value) < 1e-10 for name, value in state.items())


def plainly() -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same training on one process, without a plan."""
    model, _, _, _ = built(build, torch.float64)
    x, y = samples().tensors
    losses = []
    for rows in range(0, STEPS * BATCH, BATCH):
        loss = model(x[rows : rows + BATCH], y[rows : rows + BATCH])
        loss.backward()
        losses.append(loss.detach())
        descend(model)
    return losses, model.state_dict()


def test_a_node_that_dies_ends_the_other(nodes: tuple[str, str], tmp_path: Path) -> None:
    """No wait is endless: the rank that is left names what it waited for."""
    make_plan(build, dict(data=2), torch.float64, {}).save(tmp_path / "plan.json")
    script = tmp_path / "work.py"
    script.write_text(SCRIPT.replace("losses.append(", "os.environ['RANK'] == '1' and len(losses) and os._exit(7)\n    losses.append("))
    with marked(GLOO_SOCKET_IFNAME=CABLE) as environment:
        with pytest.raises(AssertionError, match=r"exit codes \[1, 1\]") as raised:
            run([on_node(name, node, 1, script) for node, name in enumerate(nodes)], environment, tmp_path, timeout_s=200)
        assert "WorkerError" in str(raised.value) and "rank 0 (pipe 0, data 0, tensor 0)" in str(raised.value)
        assert gone(environment[MARK])
