"""Distribution metadata of megatron-deepspeed-ext; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="megatron-deepspeed-ext",
    version="0.1.0",
    description="Pipeline schedules, recomputation and MoE dispatch for DeepSpeed and Megatron-core",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["ext", "ext.*", "patches", "patches.*"]),
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.19.8",
        "hjson",
        "numpy",
        "packaging",
        "pydantic>=2.7",
        "scipy>=1.11",
        "typer>=0.12",
        "rich>=13",
    ],
    extras_require={
        "megatron": ["megatron-core>=0.16.1", "regex"],
        "plot": ["matplotlib>=3.8"],
        "tokenizers": ["tokenizers>=0.20"],
        "monitor": ["tensorboard"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff==0.17.6",
            "pyright[nodejs]==1.1.414",
            "import-linter>=2.1",
        ],
    },
)
