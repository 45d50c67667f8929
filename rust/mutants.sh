#!/usr/bin/env bash
# Mutation testing of the core: rust/mutants.sh weights cut, or all files without names. Needs `cargo install cargo-mutants`,
# which takes what begins with a dash: rust/mutants.sh bins --shard=0/3.
# Each file is held against the tests that are about it, built without optimisation: two to ten seconds a mutant.
# What it showed is in python/docs/mutants.md.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR="$PWD/target/mutants" CARGO_PROFILE_TEST_OPT_LEVEL=0 CARGO_PROFILE_TEST_DEBUG=0
export PROPTEST_CASES="${PROPTEST_CASES:-30}"
mkdir -p target/mutants # cargo mutants makes the last folder only

bins="--lib --test=bins_and_balance --test=even"
declare -A tests=(
    [arrays]="--test=arrays --test=check --test=pack" [balance]="$bins" [bins]="$bins" [carry]="--test=pack"
    [check]="--test=check" [columns]="--test=check" [cost]="--test=plan" [cut]="--test=cut"
    [error]="--test=check --test=plan" [ids]="--test=check" [keep]="--test=plan" [left]="$bins" [lockstep]="$bins"
    [online]="--test=online" [options]="--test=options --test=plan" [pack]="--test=pack" [partition]="$bins"
    [placed]="--test=plan" [plan]="--test=plan" [rows]="--test=pack" [steps]="--test=steps --test=options"
    [summary]="--test=summary --test=check" [swaps]="$bins" [waits]="--test=plan" [weights]="--test=weights"
)
files=() options=()
for argument; do
    [[ $argument == -* ]] && options+=("$argument") || files+=("$argument")
done
[ ${#files[@]} -gt 0 ] || files=("${!tests[@]}")
for file in "${files[@]}"; do
    read -ra chosen <<< "${tests[$file]}"
    # Status 2 is: some live, and 3: some went on until their time was over.
    cargo mutants -p rollpack-core -f "rust/core/src/$file.rs" --timeout 40 --no-shuffle -o "target/mutants/$file" \
        "${options[@]}" "${chosen[@]/#/--cargo-arg=}" || [[ $? == [23] ]]
done
