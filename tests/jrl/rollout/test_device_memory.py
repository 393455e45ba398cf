"""Free memory of a machine, from files of the system."""

import resource

import pytest

from jrl.rollout.device_memory import free_host_memory

GIB = 2**30
MEMINFO = {"proc/meminfo": f"MemTotal: {32 * 2**20} kB\nMemAvailable: {20 * 2**20} kB\n"}


def version_2(folder, limit, used, cached=0):
    return {
        f"sys/fs/cgroup/{folder}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{used}\n",
        f"sys/fs/cgroup/{folder}memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


def version_1(folder, limit, used, cached=0):
    files = "sys/fs/cgroup/memory/" + folder
    return {
        f"{files}memory.limit_in_bytes": f"{limit}\n",
        f"{files}memory.usage_in_bytes": f"{used}\n",
        f"{files}memory.stat": f"total_inactive_file {cached}\n",
    }


GROUP_2, GROUP_1 = (
    {"proc/self/cgroup": "0::/a/b\n"},
    {"proc/self/cgroup": "4:cpu,memory:/a\n0::/\n"},
)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 20),
        (MEMINFO | GROUP_2, 20),
        (MEMINFO | GROUP_2 | version_2("a/b/", "max", 9 * GIB), 20),
        (MEMINFO | GROUP_2 | version_2("a/b/", 8 * GIB, 3 * GIB), 5),
        # Cached files can be dropped.
        (MEMINFO | GROUP_2 | version_2("a/b/", 8 * GIB, 3 * GIB, 2 * GIB), 7),
        # Each group above has its own limit; a container sees its own as the root.
        (MEMINFO | GROUP_2 | version_2("a/", 4 * GIB, GIB) | version_2("a/b/", "max", 0), 3),
        (MEMINFO | GROUP_2 | version_2("", 2 * GIB, GIB), 1),
        (MEMINFO | GROUP_1 | version_1("a/", 8 * GIB, 3 * GIB, GIB), 6),
        (MEMINFO | GROUP_1 | version_1("", 6 * GIB, 3 * GIB), 3),
        (MEMINFO | GROUP_2 | version_2("a/b/", GIB, 2 * GIB), 0),
        (GROUP_2 | version_2("a/b/", 8 * GIB, 0), 8),
    ],
)
def test_free_memory_is_the_least_of_all_limits(tmp_path, files, expected):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert free_host_memory(tmp_path) == expected * GIB


def test_free_memory_counts_limits_of_the_process(tmp_path, monkeypatch):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text(f"VmSize: {2**20} kB\nVmData: {2**19} kB\n")
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: 4 * GIB}
    monkeypatch.setattr(resource, "getrlimit", lambda name: (limits[name], -1))
    assert free_host_memory(tmp_path) == 4 * GIB - GIB // 2
    limits[resource.RLIMIT_AS] = 3 * GIB
    assert free_host_memory(tmp_path) == 2 * GIB
