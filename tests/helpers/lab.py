"""A cluster of several hosts on one Linux machine, for tests of `ray up` with the project's own cluster.yaml.

A host is a set of namespaces (network, processes, mounts, names) with files of its own: /root, /tmp, /run and /dev/shm.
All see the environment in which the tests run. A bridge connects them, and nothing leads out of the machine.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from helpers.ray_processes import wait_until

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = {"laptop": "10.77.0.100", "head": "10.77.0.1", "worker1": "10.77.0.2", "worker2": "10.77.0.3"}
PROGRAMS = ("unshare", "nsenter", "ip", "mount", "ssh", "ssh-keygen", "sshd", "rsync")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SSHD = """
Port 22
HostKey {folder}/host_key
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PubkeyAuthentication yes
UseDNS no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
MaxSessions 100
"""
# Runs as process 1 of a host. $1: the lab's folder, $2: the host, further: what it shares with this machine, read-only.
_INIT = """
set -e
lab=$1 host=$2; shift 2
mount --make-rprivate /
hostname $host
own=$lab/$host
mkdir -p $own/root/.ssh $own/tmp $own/tmp/lab; chmod 700 $own/root $own/root/.ssh; chmod 1777 $own/tmp
for shared in "$@"; do
    case $shared in /root/*|/tmp/*)
        mkdir -p $own$shared; mount --bind $shared $own$shared; mount -o remount,ro,bind $own$shared;;
    esac
done
mount --bind $lab $own/tmp/lab
if [ $host = laptop ]; then cp $lab/key $own/root/.ssh/key; chmod 600 $own/root/.ssh/key
else cp $lab/key.pub $own/root/.ssh/authorized_keys; chmod 600 $own/root/.ssh/authorized_keys; fi
mount --bind $lab/hosts /etc/hosts
mount --rbind $own/root /root
mount --rbind $own/tmp /tmp
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs tmpfs /run; mkdir -p /run/sshd
mount -t proc proc /proc
cd /
until [ -e /tmp/lab/$host.connected ]; do sleep 0.1; done
ip link set lo up
if [ $host != laptop ]; then
    env -i PATH=$PATH HOME=/root $(command -v sshd) -D -f /tmp/lab/sshd_config -E /tmp/lab/$host.sshd.log &
fi
while :; do wait -n || true; sleep 1; done
"""


def missing() -> str:
    """Return why there can be no lab on this machine, "" if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    if absent := [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]:
        return f"needs the programs {', '.join(absent)}"
    attempt = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "namespaces are not allowed" if attempt.returncode else ""


class Lab:
    """The hosts `laptop`, `head`, `worker1` and `worker2`; `folder` must be empty and below /tmp."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._namespaces: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}
        for key in ("key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
        names = "".join(f"{address} {host}\n" for host, address in ADDRESSES.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (folder / "sshd_config").write_text(_SSHD.format(folder="/tmp/lab"))
        (folder / "init.sh").write_text(_INIT)

    def start(self) -> None:
        """Start and connect all hosts."""
        shared = [sys.base_prefix, sys.prefix, str(ROOT)]
        flags = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        for host in ADDRESSES:
            command = ["unshare", *flags, "bash", str(self.folder / "init.sh"), str(self.folder), host, *shared]
            with open(self.folder / f"{host}.log", "wb") as log:
                self._namespaces[host] = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=log,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    env=os.environ | {"PATH": _PATH},
                )
        for host, process in self._namespaces.items():
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_until(lambda children=children: children.read_text().split(), 30)
            self._pids[host] = int(children.read_text().split()[0])
        bridge = ["nsenter", "-t", str(self._pids["laptop"]), "-n", "ip"]
        for words in (
            "link add bridge type bridge",
            f"addr add {ADDRESSES['laptop']}/24 dev bridge",
            "link set bridge up",
        ):
            subprocess.run([*bridge, *words.split()], check=True)
        for host, address in ADDRESSES.items():
            if host != "laptop":
                pid = self._pids[host]
                inside = ["nsenter", "-t", str(pid), "-n", "ip"]
                link = f"link add to-{host} type veth peer name eth0 netns {pid}"
                subprocess.run([*bridge, *link.split()], check=True)
                subprocess.run([*bridge, *f"link set to-{host} master bridge up".split()], check=True)
                subprocess.run([*inside, *f"addr add {address}/24 dev eth0".split()], check=True)
                subprocess.run([*inside, *["link", "set", "eth0", "up"]], check=True)
            (self.folder / f"{host}.connected").touch()
        for host in ("head", "worker1", "worker2"):
            wait_until(lambda host=host: ":22 " in self.listeners(host), 60)

    def stop(self) -> None:
        """End all processes of all hosts."""
        for pid in self._pids.values():  # process 1 takes all others of its host with it
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._namespaces.values():
            process.kill()
            process.wait()

    def path(self, host: str, name: str) -> Path:
        """Return where a file of a host's /root is on this machine."""
        return self.folder / host / "root" / name

    def run(
        self, host: str, command: str, *, seconds: float = 300, check: bool = True
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command of a shell on a host, in /root."""
        done = self.start_command(host, command)
        try:
            out, err = done.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            done.kill()
            out, err = done.communicate()
            raise AssertionError(f"{host}: {command}: no end after {seconds} s\n{out[-3000:]}\n{err[-3000:]}") from None
        assert not check or done.returncode == 0, f"{host}: {command}\n{out[-3000:]}\n{err[-3000:]}"
        return subprocess.CompletedProcess(command, done.returncode, out, err)

    def start_command(self, host: str, command: str) -> "subprocess.Popen[str]":
        """Start a command of a shell on a host and return its process."""
        environment = ["HOME=/root", "USER=root", "LANG=C.UTF-8", "TERM=xterm", f"PATH={sys.prefix}/bin:{_PATH}"]
        words = f"cd /root; [ -e .bashrc ] && . ./.bashrc; {command}"
        enter = ["nsenter", "-t", str(self._pids[host]), "-n", "-m", "-p", "-u", "-i", "--", "env", "-i"]
        return subprocess.Popen(
            [*enter, *environment, "bash", "-c", words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def listeners(self, host: str) -> str:
        """Return the addresses on which a host accepts connections, one per line."""
        tables = "cat /proc/net/tcp /proc/net/tcp6"
        lines = self.run(host, tables).stdout.splitlines()
        found = {_address(line.split()[1]) for line in lines if line.split()[3] == "0A"}
        return "".join(f"{address} \n" for address in sorted(found))


def _address(text: str) -> str:
    """Return an address of /proc/net/tcp as address:port."""
    words, port = text.split(":")
    number = words[-8:] if words[-8:] != "00000000" or len(words) == 8 else "00000000"
    parts = [str(int(number[i : i + 2], 16)) for i in (6, 4, 2, 0)]
    return f"{'.'.join(parts)}:{int(port, 16)}"


def cluster_file(lab: Lab, *, min_workers: int = 2, head_cpus: int = 0) -> dict[str, Any]:
    """Return cluster.yaml for the hosts of the lab: other machines and fewer installations, but the same cluster.

    Each worker has one CPU, and the head none unless `head_cpus` says so: two hosts of a trial are on two machines.
    """
    content: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    content["provider"] = {
        "type": "local",
        "head_ip": ADDRESSES["head"],
        "worker_ips": [ADDRESSES["worker1"], ADDRESSES["worker2"]],
    }
    content["auth"] = {"ssh_user": "root", "ssh_private_key": "~/.ssh/key"}
    for key in ("available_node_types", "head_node_type", "docker"):
        content.pop(key)
    content["min_workers"], content["max_workers"] = min_workers, 2
    content["file_mounts"] = {
        remote: str(ROOT / local[2:]) if local.startswith("./") else local
        for remote, local in content["file_mounts"].items()
    }
    kept = [command for command in content["setup_commands"] if "apt-get" not in command and "make venv" not in command]
    modules = "grep -q PYTHONPATH ~/.bashrc || echo 'export PYTHONPATH=$HOME/rayfed' >> ~/.bashrc"  # not the tests' own
    content["setup_commands"] = [f"ln -sfn {shlex.quote(sys.prefix)} ~/rayfed/.venv", modules, *kept]
    content["head_setup_commands"] = [one for one in content["head_setup_commands"] if one.startswith("mkdir")]
    for key, cpus in (("head_start_ray_commands", head_cpus), ("worker_start_ray_commands", 1)):
        content[key] = [
            command + (f" --num-cpus={cpus} --object-store-memory=200000000" if "ray start" in command else "")
            for command in content[key]
        ]
    return content
