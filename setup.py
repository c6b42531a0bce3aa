from pathlib import Path

from setuptools import find_packages, setup

PLOTS = ["matplotlib>=3.8"]
ARROW = ["pyarrow>=15"]
HF = ["transformers>=5"]
TENSORBOARD = ["tensorboard>=2.15"]
WANDB = ["wandb>=0.16"]

setup(
    name="dflash-engine",
    version="0.1.0",
    description="Trains DFlash drafters with every step in a CUDA graph: length buckets, fixed buffers, replay.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["engine*", "buffers*", "graphs*", "bench*"]),
    package_data={"engine": ["embedded/*", "*.html"]},
    install_requires=[
        "torch>=2.11",
        "triton; platform_system == 'Linux'",
        "numpy>=1.26",
        "einops>=0.7",
        "safetensors>=0.4.3",
        "click>=8.1",
        "rich>=13",
    ],
    extras_require={
        "plots": PLOTS,
        "arrow": ARROW,
        "hf": HF,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        # ruff and mypy report different things in each minor version, and the tests run both.
        "test": [*PLOTS, *ARROW, *HF, "pytest>=8", "pytest-xdist>=3.6", "ruff>=0.17,<0.18", "mypy>=2.4,<2.5"],
    },
    entry_points={"console_scripts": ["dflash-engine = bench.cli:main"]},
)
