"""`python -m ext doctor`: each finding with its fix; nothing that it looks at is imported."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import ext
from ext.commands import doctor, doctor_hosts, doctor_machine
from ext.commands.findings import Finding

app = typer.Typer()
app.command()(doctor.doctor)
BIN = Path(sys.executable).parent


@pytest.fixture
def no_torch_process(monkeypatch):
    """torch's answer as on a machine without GPU, without the seconds that it takes."""
    monkeypatch.setattr(doctor_machine, "_ask_torch", lambda environ: {"cuda": None, "devices": []})


@pytest.fixture
def releases(monkeypatch):
    """Installed releases; one that is not set is not installed."""
    installed = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "megatron-core": "0.16.1"}
    for module in (doctor_hosts, doctor_machine):
        monkeypatch.setattr(module, "installed_version", installed.get)
    return installed


def levels(findings):
    return [finding.level for finding in findings]


class TestCommand:
    def test_json(self, no_torch_process, monkeypatch, tmp_path):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        result = CliRunner().invoke(app, ["--json"])
        assert result.exit_code == 0, result.stdout
        answer = json.loads(result.stdout)
        assert set(answer) == {"findings"}
        assert all(set(finding) == {"level", "what", "fix"} for finding in answer["findings"])
        assert all(finding["fix"] for finding in answer["findings"] if finding["level"] in ("warning", "error"))
        whats = " ".join(finding["what"] for finding in answer["findings"])
        for topic in (
            "megatron-deepspeed-ext",
            "python",
            "torch",
            "deepspeed",
            "apex",
            "port",
            "/dev/shm",
            "c++",
            "ninja",
        ):
            assert topic in whats

    def test_an_error_changes_the_exit_code(self, no_torch_process, releases):
        releases["deepspeed"] = "0.18.2"
        result = CliRunner().invoke(app, ["--json"])
        assert result.exit_code == 2
        assert "error" in [finding["level"] for finding in json.loads(result.stdout)["findings"]]

    def test_text(self, no_torch_process, releases):
        releases["deepspeed"] = "0.18.2"
        result = CliRunner().invoke(app, [])
        assert result.exit_code == 2
        assert "error   deepspeed 0.18.2 is installed, 0.19.8 or newer is needed: " in result.stdout
        assert "fix: pip install 'deepspeed>=0.19.8'" in result.stdout
        assert "1 error" in result.stdout.splitlines()[-1]

    def test_a_probe_that_fails_is_a_finding(self, no_torch_process, monkeypatch):
        def refuse(*arguments):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(doctor_machine.shutil, "disk_usage", refuse)
        findings = doctor.examine(os.environ)
        assert (
            Finding("warning", "disks could not be looked at: [Errno 13] Permission denied", "check access rights")
            in findings
        )
        assert any(finding.what.startswith("port") for finding in findings)


class TestHosts:
    def test_nothing_installed(self, releases):
        releases.clear()
        assert levels([*doctor_hosts.torch(), *doctor_hosts.deepspeed(), *doctor_hosts.megatron({})]) == [
            "error",
            "error",
            "info",
        ]
        assert list(doctor_machine.accelerator({})) == []
        assert list(doctor_machine.launcher({})) == []

    @pytest.mark.parametrize(
        ("version", "level", "text"),
        [
            ("0.17.6", "error", "(this release multiplies them by 4)"),
            ("0.18.2", "error", "(this release multiplies them by 4)"),
            ("0.18.4", "error", "(this release crashes in fp32)"),
            ("0.19.2", "error", "(this release multiplies those of stage 0 by 0.25)"),
            ("0.19.8", "ok", "needed: 0.19.8 or newer, tested up to 0.19.8"),
            ("0.20.1", "info", "newer than the newest tested one, 0.19.8"),
        ],
    )
    def test_deepspeed(self, releases, version, level, text):
        releases["deepspeed"] = version
        (finding,) = doctor_hosts.deepspeed()
        assert finding.level == level
        assert version in finding.what
        assert text in finding.what
        assert (finding.fix == "pip install 'deepspeed>=0.19.8'") == (level == "error")

    @pytest.mark.parametrize(
        ("version", "level"), [("2.5.1", "error"), ("2.6.0+cu124", "ok"), ("2.13.1", "ok"), ("3.0", "info")]
    )
    def test_torch(self, releases, version, level):
        releases["torch"] = version
        assert levels(doctor_hosts.torch()) == [level]

    def test_another_release_of_this_package_is_installed(self, monkeypatch):
        monkeypatch.setattr(doctor_hosts, "version", lambda name: "0.0.9")
        (finding,) = doctor_hosts.package()
        assert finding.level == "warning"
        assert "0.1.0 runs from" in finding.what
        assert "0.0.9 is installed" in finding.what


class TestMegatron:
    @staticmethod
    def checkout(folder, numbers=(0, 16, 1), pre_release=""):
        (folder / "megatron" / "training").mkdir(parents=True)
        (folder / "megatron" / "core").mkdir()
        (folder / "pretrain_gpt.py").touch()
        info = folder / "megatron" / "core" / "package_info.py"
        names = zip(("MAJOR", "MINOR", "PATCH"), numbers, strict=True)
        info.write_text("".join(f"{name} = {number}\n" for name, number in names) + f"PRE_RELEASE = '{pre_release}'\n")
        return folder

    def test_only_the_wheel(self, releases):
        core, training = doctor_hosts.megatron({})
        assert core.level == "ok"
        assert training == Finding(
            "info",
            "megatron-core 0.16.1 has no training code: the wheel holds megatron.core only, without megatron.training "
            "and pretrain_gpt.py",
            "git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM, then export MEGATRON_LM=<its "
            "folder> or pass --megatron <its folder>",
        )

    def test_checkout_of_the_same_release(self, releases, tmp_path):
        _, finding = doctor_hosts.megatron({"MEGATRON_LM": str(self.checkout(tmp_path))})
        assert finding == Finding("ok", f"Megatron-LM checkout {tmp_path}, release 0.16.1")

    @pytest.mark.parametrize(
        ("numbers", "pre_release", "found"), [((0, 15, 3), "", "0.15.3"), ((0, 16, 1), "rc0", "0.16.1rc0")]
    )
    def test_checkout_of_another_release(self, releases, tmp_path, numbers, pre_release, found):
        _, finding = doctor_hosts.megatron({"MEGATRON_LM": str(self.checkout(tmp_path, numbers, pre_release))})
        assert finding == Finding(
            "warning",
            f"megatron-core 0.16.1 is installed, the Megatron-LM checkout {tmp_path} is {found}",
            f"git -C {tmp_path} checkout core_v0.16.1, or pip install megatron-core=={found}",
        )

    def test_a_folder_that_is_no_checkout(self, releases, tmp_path):
        _, finding = doctor_hosts.megatron({"MEGATRON_LM": str(tmp_path)})
        assert finding.level == "error"
        assert finding.what == (
            f"{tmp_path} is no checkout of Megatron-LM: it has no pretrain_gpt.py, megatron/training, megatron/core"
        )

    @pytest.mark.parametrize("content", ["", "MAJOR = x", b"\xff\xfe"])
    def test_a_checkout_without_release(self, releases, tmp_path, content):
        folder = self.checkout(tmp_path)
        info = folder / "megatron" / "core" / "package_info.py"
        info.write_bytes(content if isinstance(content, bytes) else content.encode())
        _, finding = doctor_hosts.megatron({"MEGATRON_LM": str(folder)})
        assert finding.level == "warning"
        assert "cannot be read" in finding.what

    def test_release_of_the_installed_files_is_read_right(self):
        spec = doctor_hosts.find_spec("megatron")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        # Other tests may have loaded the namespace with more places in front.
        places = [Path(place) for place in spec.submodule_search_locations]
        (parent,) = [place.parent for place in places if (place / "core" / "package_info.py").is_file()]
        assert doctor_hosts.checkout_version(parent) == doctor_hosts.version("megatron-core")


class TestApex:
    @pytest.fixture
    def place(self, tmp_path, monkeypatch):
        """A package `apex` that breaks when it is imported, with the given folders."""
        monkeypatch.syspath_prepend(tmp_path)

        def make(*folders):
            package = tmp_path / "apex"
            for folder in folders:
                (package / folder).mkdir(parents=True)
            package.mkdir(exist_ok=True)
            (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
            return package

        return make

    def test_web_framework(self, place, tmp_path):
        package = place("templates")
        info = tmp_path / "apex-0.9.10.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\nSummary: Toolkit for Pyramid\n"
        )
        (finding,) = doctor_hosts.apex()
        assert finding == Finding(
            "warning",
            f"apex 0.9.10 in {package} is not NVIDIA apex: it offers none of apex.multi_tensor_apply, "
            "apex.normalization, apex.optimizers (it calls itself: Toolkit for Pyramid). This package works without "
            "it; a host that imports apex may fail",
            "pip uninstall apex; NVIDIA's is built from https://github.com/NVIDIA/apex and is not on PyPI",
        )

    def test_without_metadata(self, place):
        place()
        (finding,) = doctor_hosts.apex()
        assert finding.level == "warning"
        assert finding.what.startswith("a package apex in ")

    def test_nvidias(self, place):
        package = place("multi_tensor_apply", "normalization", "optimizers", "amp")
        assert list(doctor_hosts.apex()) == [Finding("ok", f"NVIDIA apex in {package}")]

    def test_none(self):
        assert levels(doctor_hosts.apex()) == ["ok"]

    def test_everything_works_beside_it(self, place, tmp_path):
        place("templates")
        config = tmp_path / "ds_config.json"
        config.write_text('{"ext": {"pipeline": {"schedule": "1f1b"}}}')
        code = (
            "import ext, ext.config, ext.commands.doctor, sys; "
            "assert not {'apex', 'torch', 'deepspeed', 'megatron'} & set(sys.modules)"
        )
        environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(ext.__file__).parents[1]}"}
        subprocess.run([sys.executable, "-c", code], env=environ, check=True)
        subprocess.run(
            [sys.executable, "-m", "ext", "check", str(config)], env=environ, check=True, capture_output=True
        )


class TestLocks:
    def lock(self, root, seconds_old):
        path = root / "deepspeed_shm_comm" / "lock"
        path.parent.mkdir()
        path.touch()
        made = time.time() - seconds_old
        os.utime(path, (made, made))
        return path

    def test_killed_build(self, tmp_path):
        path = self.lock(tmp_path, 7200)
        (finding,) = doctor_machine.extension_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
        assert finding.level == "error"
        assert finding.what.startswith(
            f"extension 'deepspeed_shm_comm': lock {path} is 2 hours old and no process here"
        )
        assert finding.what.endswith("a build was killed, and every later run waits for it")
        assert finding.fix == f"rm {path}"

    def test_young_lock(self, tmp_path):
        path = self.lock(tmp_path, 0)
        (finding,) = doctor_machine.extension_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
        assert finding.level == "warning"
        assert finding.fix.startswith(f"rm {path}, unless another machine")

    def test_build_in_progress(self, tmp_path):
        path = self.lock(tmp_path, 7200)
        with path.open():
            (finding,) = doctor_machine.extension_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
        assert finding.level == "info"
        assert f"held by process {os.getpid()}, which builds it; other runs wait" in finding.what

    def test_none(self, tmp_path):
        assert list(doctor_machine.extension_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path / "x")})) == [
            Finding("ok", f"no build of an extension is locked under {tmp_path / 'x'}")
        ]


class TestMachine:
    def test_cpu(self, no_torch_process, releases):
        (finding,) = doctor_machine.accelerator({})
        assert finding.level in ("info", "warning")

    def test_gpus(self, monkeypatch, releases):
        devices = [["NVIDIA H100", 80 * 2**30]] * 2
        monkeypatch.setattr(doctor_machine, "_ask_torch", lambda environ: {"cuda": "12.8", "devices": devices})
        found = list(doctor_machine.accelerator({"CUDA_HOME": "/usr/local/cuda"}))
        assert found == [Finding("ok", "2 GPU(s): NVIDIA H100, 80 GiB; torch is built for CUDA or ROCm 12.8")]

    def test_cuda_asked_without_one(self, no_torch_process, releases):
        *_, finding = doctor_machine.accelerator({"DS_ACCELERATOR": "cuda"})
        assert (finding.level, finding.fix) == ("error", "unset DS_ACCELERATOR")

    def test_a_torch_that_cannot_be_imported(self, tmp_path, releases):
        (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
        (finding,) = doctor_machine.accelerator({**os.environ, "PYTHONPATH": str(tmp_path)})
        assert finding.level == "error"
        assert finding.what == "torch cannot be imported: OSError: libcudart.so.12: cannot open shared object file"

    def test_a_torch_that_crashes(self, tmp_path, releases):
        (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 9)\n")
        (finding,) = doctor_machine.accelerator({**os.environ, "PYTHONPATH": str(tmp_path)})
        assert finding.what == "torch cannot be imported: the process ended with code -9"

    def test_a_torch_that_hangs(self, tmp_path, releases, monkeypatch):
        monkeypatch.setattr(doctor_machine, "TORCH_SECONDS", 0.3)
        (tmp_path / "torch.py").write_text("import time; time.sleep(60)\n")
        (finding,) = doctor_machine.accelerator({**os.environ, "PYTHONPATH": str(tmp_path)})
        assert finding.what == "torch cannot be imported: no answer within 0 s"

    def test_the_real_torch_answers(self):
        answer = doctor_machine._ask_torch(os.environ)
        assert isinstance(answer, dict)
        assert isinstance(answer["devices"], list)

    def test_launcher(self, releases, tmp_path):
        assert levels(doctor_machine.launcher({"PATH": str(BIN)})) == ["ok"]
        (finding,) = doctor_machine.launcher({"PATH": str(tmp_path)})
        assert finding == Finding("warning", "the launcher 'deepspeed' is not on PATH", f"export PATH={BIN}:$PATH")
        other = tmp_path / "deepspeed"
        other.write_text("#!/bin/sh\n")
        other.chmod(0o755)
        (finding,) = doctor_machine.launcher({"PATH": str(tmp_path)})
        assert finding.what.startswith(f"the launcher on PATH is {other}, of another environment than this Python")

    def test_mpirun_without_ranks(self, releases):
        _, finding = doctor_machine.launcher({"PATH": str(BIN), "OMPI_COMM_WORLD_SIZE": "4"})
        assert finding.level == "warning"
        assert "RANK and WORLD_SIZE are not set" in finding.what

    def test_compilers(self, tmp_path):
        assert levels(doctor_machine.compilers({"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"})) == ["ok", "ok"]
        compiler, ninja = doctor_machine.compilers({"PATH": str(tmp_path), "CXX": "no-such-c++"})
        assert compiler == Finding(
            "warning",
            "no-such-c++ is not on PATH: DeepSpeed cannot build its extensions",
            "apt-get install g++, or set CXX to a C++17 compiler",
        )
        assert ninja == Finding("warning", "ninja is not on PATH, but beside this Python", f"export PATH={BIN}:$PATH")

    def test_port(self):
        with socket.socket() as other:
            other.bind(("", 0))
            other.listen()
            number = other.getsockname()[1]
            (finding,) = doctor_machine.port({"MASTER_PORT": str(number)})
        assert finding.level == "warning"
        assert finding.what.startswith(f"port {number}, where ranks meet, cannot be used: ")
        assert "--master_port" in finding.fix
        assert levels(doctor_machine.port({"MASTER_PORT": str(number)})) == ["ok"]

    @pytest.mark.parametrize("text", ["", "x", "0", "65536", "-1"])
    def test_wrong_port(self, text):
        (finding,) = doctor_machine.port({"MASTER_PORT": text})
        assert finding.what == f"MASTER_PORT={text!r} is no port"

    def test_disks(self, tmp_path, monkeypatch):
        environ = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "not" / "yet"), "TMPDIR": str(tmp_path)}
        usage = shutil.disk_usage(tmp_path)._replace(free=3 * 2**30)
        monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda path: usage)
        assert levels(doctor_machine.disks(environ)) == ["ok", "ok", "ok"]
        usage = usage._replace(free=2**30)
        assert [finding.what.split(", ")[-1] for finding in doctor_machine.disks(environ)] == ["has 1.0 GiB free"] * 3

    def test_memory(self, monkeypatch):
        assert 0 < (doctor_machine._available_memory() or 0) < 100_000
        monkeypatch.setattr(doctor_machine, "_available_memory", lambda: 1.0)
        usage = shutil.disk_usage("/")._replace(total=64 * 2**20, free=64 * 2**20)
        monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda path: usage)
        host, shared, *_ = doctor_machine.memory()
        assert host == Finding("warning", "1.0 GiB of host memory available", "end other programs or use fewer ranks")
        assert shared.level == "warning"
        assert shared.what == "/dev/shm has 0.06 of 0.06 GiB free"
        assert "--shm-size" in shared.fix

    def test_buffers_that_no_process_uses(self, tmp_path):
        for rank in range(2):
            (tmp_path / f"deepspeed_allreduce_buffer_0_127.0.0.1_29500_{rank}").write_bytes(bytes(2**20))
        (tmp_path / "other").write_bytes(b"1")
        process = tmp_path / "proc" / "12"
        process.mkdir(parents=True)
        look = doctor_machine._left_buffers
        (process / "maps").write_text(
            "7f00-7f10 rw-s 0 00:1 5 /dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_29500_1\n"
        )
        (found,) = look(tmp_path, tmp_path / "proc")
        assert found.what == f"1 buffers of ended DeepSpeed runs hold 0.00 GiB of memory in {tmp_path}"
        assert found.fix == f"when no job runs here: rm {tmp_path}/deepspeed_allreduce_buffer_*"
        (process / "maps").write_text("")
        assert "2 buffers" in next(look(tmp_path, tmp_path / "proc")).what
        assert not list(look(tmp_path / "proc"))
