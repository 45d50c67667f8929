//! The coverage-guided fuzzer. `rust/fuzz/run.sh SECONDS` builds and runs it, on a stable toolchain.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    rollpack_fuzz::check(bytes);
});
