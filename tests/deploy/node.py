"""One node of a cluster on this machine: containerd, kubelet and kube-proxy in network, mount, process and host-name
namespaces of their own.

In: a network namespace with the node's address, the binaries, a kubeconfig, a folder. Out: commands that run on the node,
and the last lines of its logs. Invariants: everything of the node, its pods too, is below one process, and what it mounts is
in that process's namespace: when that process ends, nothing runs and nothing is mounted. Only empty control groups stay,
for whoever made the node to remove.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.deploy.cluster_dns import DOMAIN

PATIENCE_S = 120.0
# /var and /run are the node's own. What a kubelet would set for the whole machine looks set already.
INIT = """
set -eu
mount --make-rprivate /
mkdir -p "$FOLDER/var" "$FOLDER/var-work" "$FOLDER/set"
mount -t overlay overlay -o "lowerdir=/var,upperdir=$FOLDER/var,workdir=$FOLDER/var-work" /var
mount -t tmpfs tmpfs /run
mkdir -p /run/lock
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1; do
    file=$FOLDER/set/$(basename "${setting%=*}")
    echo "${setting#*=}" >"$file"
    mount --bind "$file" "/proc/sys/${setting%=*}"
done
hostname "$NAME"
touch "$FOLDER/up"
sleep infinity & wait
"""


@dataclass
class Node:
    name: str
    namespace: str  # network
    address: str
    pods: str  # their network
    folder: Path
    _pid: int = 0  # of the process below which everything is
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """The node without anything that runs on it."""
        self.folder.mkdir()
        # Dies with this process, however that ends.
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{self.namespace}", *namespaces]
        init = self._spawn("init", [*command, "env", f"FOLDER={self.folder}", f"NAME={self.name}", "sh", "-c", INIT])
        self.until("namespaces", (self.folder / "up").exists)
        (child,) = psutil.Process(init.pid).children()
        self._pid = child.pid

    def stop(self) -> None:
        for process in self._running.values():  # first the one that takes all others with it
            process.kill()
        for process in self._running.values():
            process.wait()

    def command(self, *words: object) -> list[str]:
        """To be run on the node."""
        return ["nsenter", "--target", str(self._pid), "--mount", "--uts", "--pid", "--net", "--", *map(str, words)]

    def run(self, *words: object, timeout: float = PATIENCE_S) -> str:
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False, timeout=timeout)
        assert done.returncode == 0, f"{self.name}: {words}: {done.stderr}{self.logs()}"
        return done.stdout

    # ---- what runs on it

    def start_containerd(self, pause_image: str) -> None:
        network = {
            "cniVersion": "0.4.0", "name": "pods",
            # Each pod's packets are routed, also to a pod of this node: a bridge would send answers past the address
            # translation of services.
            "plugins": [{"type": "ptp", "ipam": {"type": "host-local", "subnet": self.pods, "dataDir": "/var/lib/cni/networks",
                                                 "routes": [{"dst": "0.0.0.0/0"}]}}],
        }  # fmt: skip
        (self.folder / "cni").mkdir()
        (self.folder / "cni" / "10-pods.conflist").write_text(json.dumps(network))
        # Without CAP_SYS_RESOURCE nobody here may lower a score of the kernel's memory killer.
        (self.folder / "containerd.toml").write_text(f"""
version = 2
root = "{self.folder}/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause_image}"
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{self.folder}/cni"
""")
        self._spawn("containerd", self.command("containerd", "--config", self.folder / "containerd.toml"))
        self.until("containerd", lambda: self._succeeds("ctr", "version"))

    def load(self, archive: Path) -> None:
        self.run("ctr", "--namespace", "k8s.io", "images", "import", archive, timeout=600)

    def start_kubelet(self, binaries: Path, kubeconfig: Path, dns: str) -> None:
        (self.folder / "kubelet.json").write_text(json.dumps({
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupsPerQOS": False, "enforceNodeAllocatable": [],
            "oomScoreAdj": 0, "failSwapOn": False,
            "volumePluginDir": f"{self.folder}/volume-plugins", "clusterDNS": [dns], "clusterDomain": DOMAIN, "resolvConf": "",
            # What else is on the machine's disk is no reason to evict.
            "evictionHard": {"nodefs.available": "0%", "imagefs.available": "0%", "memory.available": "1Mi"},
            "imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 99,
        }))  # fmt: skip
        self._spawn("kubelet", self.command(
            binaries / "kubelet", f"--kubeconfig={kubeconfig}", f"--config={self.folder}/kubelet.json",
            f"--root-dir={self.folder}/kubelet", f"--cert-dir={self.folder}/kubelet-certificates", f"--node-ip={self.address}",
            f"--hostname-override={self.name}", "--container-runtime=remote",
            "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
        ))  # fmt: skip
        self._spawn("kube-proxy", self.command(
            binaries / "kube-proxy", f"--kubeconfig={kubeconfig}", f"--hostname-override={self.name}", "--proxy-mode=iptables", f"--bind-address={self.address}",
            # Those of the whole machine stay as they are.
            "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
        ))  # fmt: skip

    # ---- inside

    def until(self, what: str, probe: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not probe():
            ended = [name for name, process in self._running.items() if process.poll() is not None]
            assert not ended, f"{self.name}: {', '.join(ended)} ended{self.logs()}"
            assert time.monotonic() < until, f"{self.name}: {what} not up within {PATIENCE_S:g} s{self.logs()}"
            time.sleep(0.2)

    def logs(self, lines: int = 25) -> str:
        """The last lines of what runs on the node, without stacks of what crashed."""
        said = ""
        for name in self._running:
            log = (self.folder / f"{name}.log").read_text(errors="replace").split("\ngoroutine ")[0]
            said += "\n".join([f"\n---- {self.name}: {name}", *log.splitlines()[-lines:]])
        return said

    def _succeeds(self, *words: object) -> bool:
        return subprocess.run(self.command(*words), capture_output=True, check=False, timeout=30).returncode == 0

    def _spawn(self, name: str, command: Sequence[object]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            words = [str(word) for word in command]
            self._running[name] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self._running[name]
