#!/bin/sh
# Fuzzes the import of columns for so many seconds (60 if none are given); the corpus stays in target/fuzz/corpus.
# What cargo-fuzz asks of a nightly compiler, the coverage counters, a stable one has too: they are a pass of LLVM.
set -e
cd "$(dirname "$0")/../.."
export CARGO_TARGET_DIR=target/fuzz
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks"
host=$(rustc -vV | sed -n 's/host: //p') # with a target of its own, build scripts are not instrumented
cargo build --release --target "$host" -p rollpack-fuzz --features libfuzzer
mkdir -p "$CARGO_TARGET_DIR/corpus"
exec "$CARGO_TARGET_DIR/$host/release/columns" "$CARGO_TARGET_DIR/corpus" \
  -max_total_time="${1:-60}" -max_len=512 -print_final_stats=1
